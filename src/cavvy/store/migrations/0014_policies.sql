-- What the jobs of a project may use; an empty project stands for the installation.
CREATE TABLE project_policies (
    project TEXT NOT NULL,
    document TEXT NOT NULL,
    PRIMARY KEY (project)
);
